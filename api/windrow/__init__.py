"""What users and all parts of Windrow share: resources, wire, client, command line."""
