"""How the documentation is built: `python -m sphinx -W -b html .docs OUT`.

Pages are Markdown; those with code cells are executed in the build, so an example that fails fails the build.
The tables of the results page are written here, from the results that recipes committed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# For the kernels that run the code cells: models this small are no faster on more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pages import results_tables  # noqa: E402

from softs_lightning import __version__  # noqa: E402

project = "softs_lightning"
author = "the softs_lightning authors"
copyright = "the softs_lightning authors"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "jupyter_execute", "situations_table.md", "results_tables.md"]
html_theme = "furo"
html_title = f"softs_lightning {__version__}"

# Every code cell runs in each build; an error in one ends it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

(HERE / "results_tables.md").write_text(results_tables(HERE.parent / "recipes"), encoding="utf-8")
