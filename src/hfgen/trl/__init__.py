"""``GRPOTrainer(…, rollout_func=hfgen.trl.rollout())``: completions of TRL's trainer by hfgen."""

from .rollout import Rollout, rollout

__all__ = ["Rollout", "rollout"]
