"""Running the model: prompts, steps, and how a step is launched. No other package calls the model.

Read ``executor.py`` first: it forwards prompts and steps. A step is launched kernel by kernel, by
``torch.compile`` of the whole forward, or by ``graphs.py`` (CUDA graphs, by ``recorders.py``). ``hfgen.optimize`` changes what is launched: kernels of ``linears/``, and one graph for all
decoder layers (``compiled_layers.py``, ``layer_graphs.py``). ``ahead.py`` launches the next step before the
host reads whether the call is over.
"""

from .executor import Executor, call, last_logits, next_token, prefill
from .padding import hides_padding
from .step_inputs import resized

__all__ = [
    "Executor",
    "call",
    "hides_padding",
    "last_logits",
    "next_token",
    "prefill",
    "resized",
]
