"""The sizes of steps that are captured as graphs."""

# Of the steps with prompts that have graphs.
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS, MAX_SMALL_MODEL_TOKENS = 32, 1024, 8192
# Tokens times parameters of a step that takes a GPU about as long as its launches take the host: on
# an H100 3 ms, for some 100 kernels.
LAUNCH_BOUND = 10**12


def batch_sizes(max_rows: int) -> list[int]:
    """Return the sizes to which decode steps are padded, ascending.

    They are close together where a step is short, and a step is padded by an eighth at most where
    it is long.
    """
    sizes = [1, 2, 4]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + max(4, sizes[-1] // 64 * 8))
    return [size for size in sizes if size < max_rows] + [max_rows]


def prompt_sizes(max_tokens: int, num_parameters: int) -> list[int]:
    """Return the numbers of tokens to which steps with prompts are padded, ascending.

    A step is padded by a quarter or by 31 tokens at most: where it fills the GPU, its time grows
    with its tokens. The largest steps of a small model are captured, too, since launching their
    kernels one by one would take longer than the kernels.

    Args:
        max_tokens: Tokens of the KV pool.
        num_parameters: Of the model.
    """
    bound = min(LAUNCH_BOUND // num_parameters, MAX_SMALL_MODEL_TOKENS)
    largest = min(max_tokens, max(MAX_PROMPT_TOKENS, bound))
    sizes, size = [], MIN_PROMPT_TOKENS
    while size <= largest:
        sizes.append(size)
        size += max(MIN_PROMPT_TOKENS, 2 ** (size.bit_length() - 3))
    return sizes
