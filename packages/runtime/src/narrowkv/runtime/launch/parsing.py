"""One lock for everything that parses the source of kernels: Triton's compiler and its interpreter."""

import os
import threading

# Python 3.11 counts the depth of a syntax tree for all threads together. A garbage collection that runs
# Python code lets another thread parse meanwhile: "SystemError: AST constructor recursion depth mismatch".
one_thread_parses = threading.RLock()

# The thread that held the lock does not exist in a forked child.
os.register_at_fork(after_in_child=one_thread_parses._at_fork_reinit)  # type: ignore[attr-defined]
