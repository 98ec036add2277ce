"""How an extra is added: by the means of the environment at hand, never by a pip of another one."""

from __future__ import annotations

import sys
from pathlib import Path

from bridge.system.extras import how_to_install


def test_tree_of_the_installer_gets_it_by_the_installer_which_keeps_the_others(tmp_path: Path) -> None:
    (tmp_path / "extras").write_text("apprise\n")
    said = how_to_install("template", prefix=tmp_path)
    assert said == (
        "It comes with the extra [template]: run install.sh again, of the same version, with --extras apprise,template"
    )
    (tmp_path / "extras").write_text("\n")
    assert how_to_install("template", prefix=tmp_path).endswith("with --extras template")


def test_image_gets_it_when_it_is_built() -> None:
    said = how_to_install("template", prefix=Path("/opt/scheduled-events-bridge/venv"))
    assert "--build-arg EXTRAS=template" in said
    assert "install.sh with --extras template" in said
    assert "pip" not in said


def test_environment_of_ones_own_gets_it_by_its_own_pip() -> None:
    said = how_to_install("template")
    assert said.startswith("It comes with the extra [template]: ")
    assert said.endswith(f'"{sys.executable}" -m pip install "scheduled-events-bridge[template]"')


def test_path_with_a_blank_is_quoted(tmp_path: Path) -> None:
    assert '"/a b/python"' in how_to_install("template", prefix=tmp_path, python="/a b/python")
