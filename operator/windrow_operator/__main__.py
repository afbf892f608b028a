"""`python -m windrow_operator`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from windrow.errors import UserError, WindrowError
from windrow.plain_text import RecordFormatter
from windrow_operator.app import serve
from windrow_operator.log_lines import JsonFormatter
from windrow_operator.settings import Settings, parse


def _configure_logging(settings: Settings) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if settings.log_json
        else RecordFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(
        level=logging.DEBUG if settings.verbose else logging.INFO, handlers=[handler]
    )
    # kopf logs every object that it sees.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)


def main() -> int:
    """Run the operator; return 0 when it was asked to end, 1 or 2 when it cannot go on."""
    settings = parse(sys.argv[1:], os.environ)
    _configure_logging(settings)
    try:
        asyncio.run(serve(settings))
    except UserError as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - the message says it all
        return 2
    except (WindrowError, OSError) as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - the message says it all
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
