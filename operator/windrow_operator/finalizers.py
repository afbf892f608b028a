"""Add and remove the operator's own finalizers of a FinetuneJob, and no others."""

from __future__ import annotations

from windrow.crd import FINETUNE_JOB
from windrow_operator.cluster_state import ClusterState
from windrow_operator.kube import Body, Kube, kind_path


async def set_finalizer(
    kube: Kube, cluster: ClusterState, body: Body, finalizer: str, *, present: bool
) -> Body:
    """Return the job `body` after `finalizer` was added or removed, and keep it in `cluster`.

    Raises:
        Conflict: `body` is not the newest version.
        ObjectNotFound: the job is gone.
        ApiError: the API server refused or did not answer.
    """
    metadata = body["metadata"]
    others = [name for name in metadata.get("finalizers") or () if name != finalizer]
    wanted = {
        "resourceVersion": metadata["resourceVersion"],
        "finalizers": [*others, finalizer] if present else others,
    }
    path = kind_path(FINETUNE_JOB, metadata["namespace"], metadata["name"])
    written = await kube.merge(path, {"metadata": wanted})
    if written["metadata"].get("deletionTimestamp") and not wanted["finalizers"]:
        cluster.drop_job(metadata["uid"])
    else:
        cluster.put_job(written)
    return written
