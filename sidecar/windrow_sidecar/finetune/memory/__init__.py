"""Where the bytes of a job lie beside decode, and how they leave when decode asks for them."""
