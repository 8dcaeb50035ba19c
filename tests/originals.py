"""The files of authors themselves, at the commits at which they were compared.

`make originals` clones their repositories into .originals, or ORIGINALS names a folder that has
them as OWNER/NAME; without them, the rows of tests/references.py that need them are left out. A
file is refused if its content is not the one that was compared. None is part of this repository.

They run in float64 on a CPU: what they compute in bfloat16 or float32 is computed in float64, and
nothing is compiled. All store [outputs, inputs].
"""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("ORIGINALS") or ROOT / ".originals")
# What is replaced in the text of every file.
_IN_FLOAT64 = {
    "@torch.compile(fullgraph=True)": "",
    "@torch.compile": "",
    ".bfloat16()": ".double()",
    ".float()": ".double()",
    "torch.float32": "torch.float64",
    # AdaMuon's buffer for what several processes gather.
    'dtype=torch.bfloat16, device="cuda"': "dtype=torch.float64",
}


@dataclass(frozen=True)
class Original:
    """One file: where it is, and the SHA-256 of its content."""

    repository: str  # on GitHub
    commit: str
    path: str
    sha256: str
    # The number of a result of modded-nanogpt's optimizer track. Its script, or its log, which
    # begins with the script, trains when it is executed: only the section "Optimizer" is.
    result: int | None = None

    @property
    def file(self) -> Path:
        """Where it lies, if it is there."""
        return FOLDER / self.repository / self.path

    @property
    def name(self) -> str:
        """Its name on the page of references."""
        what = self.path.rpartition("/")[2]
        if self.result is not None:
            what = f"result {self.result} of the optimizer track"
        return f"{what} of {self.repository} at {self.commit[:8]}"

    def module(self) -> types.ModuleType:
        """Executes it in float64; ValueError if its content is another one."""
        data = self.file.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ValueError(
                f"{self.file} is not the file that was compared: check out {self.commit}."
            )
        text = data.decode()
        if self.result is not None:
            text = _optimizer_of(text)
        for before, after in _IN_FLOAT64.items():
            text = text.replace(before, after)
        # As a module of a package, for those that import a file beside them.
        package = types.ModuleType(f"originals_{self.commit[:8]}")
        package.__path__ = [str(self.file.parent)]
        sys.modules[package.__name__] = package
        spec = importlib.util.spec_from_loader(f"{package.__name__}.{self.file.stem}", loader=None)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        module.__package__ = package.__name__
        sys.modules[spec.name] = module
        exec(compile(text, str(self.file), "exec"), vars(module))  # noqa: S102
        return module

    def trained(
        self, make: Callable[[Any, Any, float], Any]
    ) -> Callable[[Any, Any, Any], np.ndarray]:
        """Returns a program for `references`: (start, gradients, rates) -> weights after each step.

        `make` makes a torch optimizer from the module, a list of one parameter, and a rate.
        """

        def program(start: Any, grads: Any, rates: Any) -> np.ndarray:
            import torch  # pyright: ignore[reportMissingImports]

            weights = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
            default, seen = torch.get_default_dtype(), []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of calls that torch has deprecated since
                torch.set_default_dtype(torch.float64)  # of the states that they make
                try:
                    optimizer = make(self.module(), [weights], float(rates[0]))
                    for rate, gradient in zip(rates, grads, strict=True):
                        for group in optimizer.param_groups:
                            group["lr"] = float(rate)
                        weights.grad = torch.tensor(gradient, dtype=torch.float64)
                        optimizer.step()
                        seen.append(weights.detach().numpy().copy())
                finally:
                    torch.set_default_dtype(default)
            return np.stack(seen)

        return program


_ALONE = """
import math, os
import torch
import torch.nn.functional as F
from torch import Tensor, nn

class dist:  # torch.distributed of one process
    get_world_size = staticmethod(lambda: 1)
    get_rank = staticmethod(lambda: 0)
    is_available = staticmethod(lambda: False)
    all_gather = staticmethod(lambda outputs, own: None)
"""


def _optimizer_of(script: str) -> str:
    text = re.split(r"^={20,}$", script, flags=re.M)[0]
    found = re.search(r"^#{20,}\n# *Optimizers? *#\n#{20,}\n(.*?)(?=^#{20,}$)", text, re.S | re.M)
    assert found is not None
    return _ALONE + found[1]


MUON = Original(
    "KellerJordan/Muon",
    "857d1adc159e098212f828d927460782d3da59e9",
    "muon.py",
    "1eece0b562f159e88f3a65da9b6ee8d0ab2dd647cf25c88e355d4f262e796e66",
)
NORMUON = Original(
    "zichongli5/NorMuon",
    "d45c9a4280d758e2cf0b2b8333765d040e953937",
    "normuon.py",
    "a9bd18a0eaea75864610049fb21c655a87284e16e267dbe565e7d5c70aec242a",
)
ADAMUON = Original(
    "Chongjie-Si/AdaMuon",
    "369f0b3bd9d97f82bb8ba81664207ac513e233b0",
    "gpt2/models/optimizers/adamuon.py",
    "367ffdab51f357ca16935fab13964ee6b363179973b40ce4e9f468aef0532240",
)
SOAP = Original(
    "nikhilvyas/SOAP",
    "a1e553530fde97d0e6b307d7c82ac6d38b072340",
    "soap.py",
    "9e9021335ad02371584622fa256e73fe75f3eb74446a8d8a216e956534148f6b",
)
MARS = Original(
    "AGI-Arena/MARS",
    "4831e28eba863a4e69d7e9474ff8e73bc1b410fe",
    "MARS/optimizers/mars.py",
    "5bee9e72aea3f043b415022fd0e732b4995436bd4d3faea4c347c0d54ef273e0",
)
SCION = Original(
    "LIONS-EPFL/scion",
    "f58a393e010395a5913176be5673d8839caa6285",
    "scion.py",
    "88cc654196473e798b6d7b246bf7ed1928d04add00acb3f2746f0ade3bcc21cb",
)
C_LION = Original(
    "kyleliang919/C-Optim",
    "2c0517c4db2e50b56d389ba4803eab1f4b3b8ae3",
    "c_lion.py",
    "5be246e816cf5fc5d02affacc71fb281175365c5d21aa13c433bc2854e712a4c",
)
C_ADAMW = Original(
    C_LION.repository,
    C_LION.commit,
    "c_adamw.py",
    "1514a0dfe4b65a38fb01e91399b0d9383f5f43a032730cf0c0d48adfcbae7b33",
)
C_MUON = Original(
    C_LION.repository,
    C_LION.commit,
    "c_muon.py",
    "392ed77f209b7b71e77c2359fbeef908854caff40dfc2b387db40e94733a92cf",
)
GRAMS = Original(
    "Gunale0926/Grams",
    "f91a375daaa85c5a4644e3f064ca6693c59f6cdb",
    "grams/src/grams.py",
    "fa5ef64bd5c574ccbb1fe4d6395fcd94a7d430702e7039b9b57c44f1297b00a9",
)
ADOPT = Original(
    "iShohei220/adopt",
    "6468572b4b3688a2f056b796b071da540568520e",
    "src/adopt/adopt.py",
    "b951aa5d12a6ff55cf64b86fc50ada4e6ea3469415cde78b79887a41795935ed",
)
ADEMAMIX = Original(
    "apple/ml-ademamix",
    "c3d73c09f1287e5c33b95189bb0aa7de0a5a7667",
    "pytorch/ademamix.py",
    "e4d247f2f780cd35104f15f10c1802afa5edf5e1732734c24b4a4ae8ca23cc19",
)
LAPROP = Original(
    "Z-T-WANG/LaProp-Optimizer",
    "a419916505bfb5d6a55f6b7b0ae14eb401b3be12",
    "laprop.py",
    "8f153db8876a1e8d27105860d43c7a9702e22cb32a3db51298d43c2325dc1cfb",
)
KL_METHODS = Original(
    "yorkerlin/KL-Methods",
    "a02e6221556301cf84f9607c73f327910afb2b95",
    "optim/kl_opt.py",
    "442d743e516f7ed453e60d0502460ffdc744b8e1708dbdac56d4aef0929a9c1a",
)
# Results of modded-nanogpt's optimizer track, by number: the file, and its hash.
TRACK = {
    number: Original(
        "KellerJordan/modded-nanogpt",
        "f411b3d346aa52d3504324ca93c230fd84c6c07f",
        f"records/track_3_optimization/results/{path}",
        sha256,
        number,
    )
    for number, (path, sha256) in {
        1: (
            "7b8270c5-a9cd-4a73-b7d8-5d86a2d1e428.txt",
            "890efd650cc3deb62ecd22b43334ec92fd34dcd9224d32c25c90628de77828b1",
        ),
        4: (
            "20260430_adamh/6b19a86b-ddfe-476c-9983-2a967bd99ca9.txt",
            "a4a343fe3e23cb123bb59dbb91c3c71edd216c69df7929c0cf103a662a297ed9",
        ),
        5: (
            "20260430_muonh/train_gpt_simple_muonh.py",
            "69fa82957fea7b9e4c797294cea933ecbb003c01489bba76b13ae12ad0533b09",
        ),
        7: (
            "20260501_muonsq/train_gpt_simple_muonsq.py",
            "9b8b3e4c4409c78a135f09c1e4b8ee43449c52bd91c98ec9501cad523486b32e",
        ),
        8: (
            "20260430_normuonh/15b3e591-24fc-40dd-8547-8f201896d260.txt",
            "a3e46b3335c029f1504232cd4bb788fabdf7e8fad4e79f95907cbbccf929a959",
        ),
        9: (
            "20260501_skylight001/1cd721e0-add6-4613-a57e-5e32723efb07.txt",
            "60caf6fb968edbb94ae40fb28c39d4e5d7fe98d888fccd091a21cfe98e29e14c",
        ),
        10: (
            "20260503_normuon/08ffadff-3576-496b-9795-2dc5cf8f4f46.txt",
            "ac0c84853e44ff6dc8c79cbcb7858e2781ac7f7aafe345b9f792ce3de7623b10",
        ),
        11: (
            "20260501_contra_muon/train_gpt_simple_contra_muon_2.py",
            "756bc65ed3a0048f775bbeb3da0aabd3a10dafec04022f0866628b9696ebaad6",
        ),
        17: (
            "20260505_aurora/298f02bc-dbb4-4661-9ad8-f6429d532873.txt",
            "a407cadd8ba5508a04208e0c1c15e02b8b5fc3ae651a5f36ac5ebc12acbe9f50",
        ),
        22: (
            "20260517_ortho/d5098d67-7c1b-47b4-8833-80960d633d33.txt",
            "4da6bffd8c24caceb9e1a72b091f16816c60438af7a98275f195ef16cb6aa7fc",
        ),
        24: (
            "20260509_contra_muon_split_cooldown/train_gpt_simple_contra_muon_split_cooldown.py",
            "781afe3707712d987da61e5a06671a603e5651f3947e3dd795f585ae535381f2",
        ),
        25: (
            "20260511_klsoap_h_lr_power_decay/train_gpt_simple_klsoap_h_lr_power_decay.py",
            "07b6c5aaee4119335ac3a3a56c723e174e07d3b8f66b42f1b5d8038897261581",
        ),
        27: (
            "20260518_soaph/train_gpt_simple_soaph.py",
            "fc2e36f2fa19054a6e16904d2d17f1f61b109c8448201f52c39c45f89923f8a4",
        ),
    }.items()
}
EVERY = [*TRACK.values()] + [
    value for value in globals().copy().values() if isinstance(value, Original)
]


def are_there(original: Original) -> bool:
    """Returns whether a file is here, and torch, which all of them need."""
    return original.file.is_file() and importlib.util.find_spec("torch") is not None


def clone() -> None:
    """Clones the repositories that are not in `FOLDER`, each at its commit."""
    for repository, commit in dict.fromkeys((x.repository, x.commit) for x in EVERY):
        if (folder := FOLDER / repository).exists():
            continue
        source = f"https://github.com/{repository}.git"
        subprocess.run(["git", "clone", "--quiet", source, folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "--quiet", commit], check=True)


if __name__ == "__main__":
    clone()
