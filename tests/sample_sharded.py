"""Prints what four devices that divide the parameters sample and exchange, as JSON."""

import json
import os
import re

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from trainer import models
from trainer.data.tokenizer import ByteTokenizer
from trainer.engine.generation import Continuation, Sampling, encode_prompt
from trainer.engine.sharding import make_mesh, param_shardings

EXCHANGE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(")

if __name__ == "__main__":
    # Wide enough that each device keeps a part of the kernels.
    model = models.gpt(width=128, depth=2, num_heads=4, max_length=64)
    assert model.language is not None
    params, state = model.init(jax.random.key(0), {"tokens": jnp.ones((1, 8), jnp.int32)})
    mesh = make_mesh({"fsdp": 4})
    divided = jax.device_put(params, param_shardings(mesh, params))
    tokenizer, sampling = ByteTokenizer(), Sampling(16, temperature=0)
    tokens = encode_prompt(tokenizer, "ab")
    for used, placed in ((None, params), (mesh, divided)):
        made = Continuation(model.language, tokenizer, tokens, sampling, mesh=used)
        text = made.sample(placed, state, seed=0)[0]
        key = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 1)))
        program = made._generate.lower(placed, state, np.array([tokens], np.int32), key).compile()
        exchanges = [line for line in program.as_text().splitlines() if EXCHANGE.search(line)]
        inside = sum("while/body" in line for line in exchanges)
        print(json.dumps({"text": text, "exchanges": len(exchanges), "in loops": inside}))
