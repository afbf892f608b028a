"""A driver of made-up GPUs: real to scheduler and kubelet, and behind each device a variable alone.

It publishes a ResourceSlice, answers the kubelet over its plugin sockets, and names CDI devices of
which the container runtime sets NVIDIA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
from kubernetes import client
from waiting import wait_until

sys.path.append(str(Path(__file__).parent))
_dra, _dra_grpc = grpc.protos_and_services("dra_plugin.proto")
_registration, _registration_grpc = grpc.protos_and_services("plugin_registration.proto")

NAME = "gpu.test.windrow.dev"
CDI_KIND = "test.windrow.dev/gpu"
CDI_FILE = Path("/var/run/cdi/windrow-test.json")
GROUP = ("resource.k8s.io", "v1")


class FakeGpus:
    """The driver of one node, until the block ends.

    Args:
        kube: an API client.
        kubelet: the kubelet's root directory.
        node: its name.
        gpus: device name -> UUID.
    """

    def __init__(self, kube, kubelet, node, gpus):
        self._api = client.CustomObjectsApi(kube)
        self._socket = Path(kubelet) / "plugins" / NAME / "dra.sock"
        self._entry = Path(kubelet) / "plugins_registry" / f"{NAME}-reg.sock"
        self._node, self._gpus, self._open = node, gpus, ExitStack()
        self.registered = ""

    def __enter__(self):
        with self._open:
            self._describe_devices()
            self._serve(self._socket, _dra_grpc.add_DRAPluginServicer_to_server)
            self._serve(self._entry, _registration_grpc.add_RegistrationServicer_to_server)
            self._create("deviceclasses", self._device_class())
            self._create("resourceslices", self._slice())
            wait_until(lambda: self.registered, "the kubelet has taken the driver")
            assert self.registered == "yes", self.registered
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *_):
        self._open.close()

    # What the kubelet asks.

    def GetInfo(self, _request, _context):
        return _registration.PluginInfo(
            type="DRAPlugin",
            name=NAME,
            endpoint=str(self._socket),
            supported_versions=["v1.DRAPlugin"],
        )

    def NotifyRegistrationStatus(self, request, _context):
        self.registered = "yes" if request.plugin_registered else request.error or "refused"
        return _registration.RegistrationStatusResponse()

    def NodePrepareResources(self, request, _context):
        answer = _dra.NodePrepareResourcesResponse()
        for claim in request.claims:
            found = self._api.get_namespaced_custom_object(
                *GROUP, claim.namespace, "resourceclaims", claim.name
            )
            for result in found["status"]["allocation"]["devices"]["results"]:
                answer.claims[claim.uid].devices.add(
                    request_names=[result["request"]],
                    pool_name=result["pool"],
                    device_name=result["device"],
                    cdi_device_ids=[f"{CDI_KIND}={result['device']}"],
                )
        return answer

    def NodeUnprepareResources(self, request, _context):
        answer = _dra.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].SetInParent()
        return answer

    # What it publishes.

    def _serve(self, socket, add_to_server):
        socket.parent.mkdir(parents=True, exist_ok=True)
        server = grpc.server(ThreadPoolExecutor(2))
        add_to_server(self, server)
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        self._open.callback(lambda: server.stop(grace=None).wait())

    def _describe_devices(self):
        CDI_FILE.parent.mkdir(parents=True, exist_ok=True)
        devices = [
            {"name": name, "containerEdits": {"env": [f"NVIDIA_VISIBLE_DEVICES={uuid}"]}}
            for name, uuid in self._gpus.items()
        ]
        described = {"cdiVersion": "0.6.0", "kind": CDI_KIND, "devices": devices}
        CDI_FILE.write_text(json.dumps(described))
        self._open.callback(CDI_FILE.unlink)

    def _create(self, kind, body):
        self._api.create_cluster_custom_object(*GROUP, kind, body)
        name = body["metadata"]["name"]
        self._open.callback(self._api.delete_cluster_custom_object, *GROUP, kind, name)

    def _device_class(self):
        chosen = [{"cel": {"expression": f"device.driver == '{NAME}'"}}]
        return _object("DeviceClass", NAME, selectors=chosen)

    def _slice(self):
        return _object(
            "ResourceSlice",
            f"{self._node}-fake-gpus",
            driver=NAME,
            nodeName=self._node,
            pool={"name": self._node, "generation": 1, "resourceSliceCount": 1},
            devices=[
                {"name": name, "attributes": {"uuid": {"string": uuid}}}
                for name, uuid in self._gpus.items()
            ],
        )


def _object(kind, name, **spec):
    return {
        "apiVersion": "/".join(GROUP),
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def claim(name):
    """Return a ResourceClaim of one of these GPUs, by the request `gpu`."""
    one = {"name": "gpu", "exactly": {"deviceClassName": NAME}}
    return _object("ResourceClaim", name, devices={"requests": [one]})


def template(name):
    """Return a ResourceClaimTemplate of one of these GPUs."""
    return _object("ResourceClaimTemplate", name, spec=claim(name)["spec"])
