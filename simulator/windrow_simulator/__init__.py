"""A cluster in simulated time: devices and traffic are simulated, decisions are production's."""
