"""What happens without mosaicml-streaming, also where it is installed."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "use",
    [
        "from streampack.mds import MDSSource; MDSSource('nowhere')",
        "from streampack.mds_writer import write_mds; write_mds([{'input_ids': [1, 2]}], 'nowhere')",
    ],
    ids=["reading", "writing"],
)
def test_without_mosaicml_streaming_the_error_says_how_to_get_it(use: str, tmp_path: Path) -> None:
    code = f"""
        import sys

        sys.modules["streaming"] = None  # importing it is an error
        {use}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.stderr.splitlines()[-1] == ("ImportError: MDS needs mosaicml-streaming: pip install 'streampack[mds]'")
    assert list(tmp_path.iterdir()) == []
