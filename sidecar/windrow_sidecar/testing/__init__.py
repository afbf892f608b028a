"""Fakes that users may import: small, honest about failure, held to the contract suites."""
