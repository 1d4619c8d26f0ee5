"""verl on Rollsync: `actor_rollout_ref.rollout.name=rollsync`. See docs/verl.md.

verl finds `plugin` by the entry point group `verl.plugins`, in every process, and imports the rest when a job asks for it.
"""

NAME = "rollsync"
"""of the rollout, and of the checkpoint engine"""
