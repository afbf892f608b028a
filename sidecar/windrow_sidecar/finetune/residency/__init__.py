"""A window of frozen layers in device memory over copies that lie in files."""
