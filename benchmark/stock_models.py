"""Folders of configurations for random models at Muse Spark's sizes: the rival's make_models.py, and a draft like the
published ones.

    python benchmark/stock_models.py STOCK OUT "LAYERS EXPERTS TOP-K HEADS KV-HEADS WIDTH"

make_models.py taps the target behind its last layer, too, and leaves open whether a block's rows see those behind them.
Both change nothing of what a step costs; so every server, with the plugin or without, gets taps before the last layer,
which is where drafts have them, and the bidirectional block that DFlash2 drafts state.
"""

import json
import subprocess
import sys
from pathlib import Path

TAPS = 5


def make(stock: Path, out: Path, shape: str) -> None:
    """Writes out/target/config.json and out/draft/config.json."""
    sizes = shape.split()
    command = [sys.executable, str(stock / "make_models.py"), str(out), *sizes]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    path = out / "draft" / "config.json"
    draft = json.loads(path.read_text())
    draft["is_causal"] = False
    draft["dflash_config"]["target_layer_ids"] = taps(int(sizes[0]))
    path.write_text(json.dumps(draft, indent=1))


def taps(layers: int) -> list[int]:
    """Layers behind which the target's stream is tapped: evenly spread, the last layer left out."""
    return [i * (layers - 2) // (TAPS - 1) for i in range(TAPS)]


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
