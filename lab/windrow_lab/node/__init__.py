"""The process node: a small kubelet that runs the containers of pods as local processes.

`python -m windrow_lab.node --kubeconfig FILE --name NODE --dir DIR` registers a Node, binds
unscheduled pods to it and runs them. What it does not do, since processes have no mount or network
namespaces:

- An image is ignored: the command runs on this machine, with this machine's files and the node's
  own Python for the word `python`.
- A volume is a real directory; the mount paths of a container are replaced by it in its command,
  arguments and environment values, and nowhere else (not inside of files). Read-only mounts are not
  enforced.
- All pods share the loopback interface: their address is 127.0.0.1, and ports must differ.
- Config maps and secrets are written when the pod starts and not refreshed; tokens are refreshed.
- Resource limits are not enforced. The annotations `windrow.dev/cpuset: "0,1"` (of the pod) and
  `windrow.dev/nice.<container>: "19"` set affinity and niceness.
"""
