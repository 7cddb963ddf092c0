"""``python -m captum_hta.cli``."""

import sys

from captum_hta.cli import main

sys.exit(main())
