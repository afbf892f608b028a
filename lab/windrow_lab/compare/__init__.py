"""Ways of sharing a device, played in rounds and compared."""
