"""Contracts that users and all parts of Windrow share: resources, wire, client, errors."""
