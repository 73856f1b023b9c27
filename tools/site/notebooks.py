"""Pictures of notebooks: kept with what Sphinx has read, instead of beside the folder of the site."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx


def register(app: Sphinx) -> None:
    """Choose the folder after MyST-NB has chosen its own."""
    app.connect("builder-inited", _keep_pictures, priority=900)


def _keep_pictures(app: Sphinx) -> None:
    config = app.env.mystnb_config  # type: ignore[attr-defined]
    folder = str(Path(app.doctreedir) / "notebooks")
    app.env.mystnb_config = config.copy(output_folder=folder)  # type: ignore[attr-defined]
