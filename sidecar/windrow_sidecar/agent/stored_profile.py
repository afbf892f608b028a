"""Write a latency profile that other pods have measured where this pod's engine looks for one."""

from __future__ import annotations

import json
import logging
import os

from windrow.crd import parse_profile_spec
from windrow.errors import UserError
from windrow.proto import attach_pb2
from windrow.rundir import RunDir

_log = logging.getLogger(__name__)


def keep_profile(run_dir: RunDir, stored: attach_pb2.StoredProfile) -> bool:
    """Write the profile into the run directory; return whether it was.

    An engine's own profile stays. One that is broken is left out: the engine then measures.
    """
    path = run_dir.of_slot(stored.slot).profile()
    if path.exists():
        return False
    try:
        parse_profile_spec(json.loads(stored.profile_json))
    except (ValueError, UserError) as error:
        _log.warning("the operator sent a broken latency profile: %s", error)
        return False
    draft = path.with_suffix(".stored")
    draft.write_text(stored.profile_json, encoding="utf-8")
    try:
        os.link(draft, path)  # unlike a replacement never over what the engine has written since
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    _log.info("a latency profile of this model is stored: the engine may start from it")
    return True
