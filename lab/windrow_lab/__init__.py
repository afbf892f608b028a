"""One machine as a cluster: control plane, nodes, load, figures, the demo and the comparison."""
