"""Stand-in for SGLang's CPU kernels, which no package on PyPI holds.

SGLang imports functions of `sgl_kernel` by name. If the operators of the real package are missing, it computes with
torch instead, and calls only the function that is written here. Any other function raises an error when it is called.

`install.sh` copies this package into SGLang's environment on machines without a GPU.
"""


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Write the places of new tokens in the KV cache into the table of each request."""
    done = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"the stand-in for SGLang's CPU kernels has no {name}")

    return missing
