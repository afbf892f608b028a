"""`python -m windrow_lab.realnode`: run a command on a real node."""

from windrow_lab.realnode.node import main

raise SystemExit(main())
