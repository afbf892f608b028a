"""Requests for decode: traces, the client that sends them, and the objective of a load."""
