"""The embedded default: a control plane, a process node and a demo on one machine."""
