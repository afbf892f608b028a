"""`python -m windrow_lab.load`: play requests at decode pods."""

from windrow_lab.load.client import main

raise SystemExit(main())
