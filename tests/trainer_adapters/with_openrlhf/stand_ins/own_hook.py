"""A worker_process_setup_hook such as a user may have."""

import os


def hook():
    os.environ["OWN_HOOK_RAN"] = "yes"
