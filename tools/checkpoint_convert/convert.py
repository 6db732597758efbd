"""Convert checkpoints between Hugging Face and Megatron on a CPU: `megarl convert` in a checkout.

python tools/checkpoint_convert/convert.py hf-to-megatron --input HF_DIR --output DIR --tensor-parallel-size 2
python tools/checkpoint_convert/convert.py megatron-to-hf --input CKPT_DIR --output HF_DIR
python tools/checkpoint_convert/convert.py inspect CKPT_OR_HF_DIR
python tools/checkpoint_convert/convert.py verify A B

megarl must be installed or be in the same checkout.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.cli.main import main  # noqa: E402  (found by the line above)

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
