import os
import sys

sys.exit(3) if "JUDGE_KEY" not in os.environ else None
