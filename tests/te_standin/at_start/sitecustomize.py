"""With this folder on PYTHONPATH, every process of a run has the stand-in for Transformer Engine's compiled part."""

import te_standin

te_standin.install()
