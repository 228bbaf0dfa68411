"""One suite for every attention backend: ``pytest --pyargs attn_shared_tests --attn-backend NAME``.

A file is a clause of the contract and a test is a sentence. Each clause is a check function ``check_...(evaluate, ...)``; the same check
must fail on the faulty backends of ``attn_shared_tests.faulty``.
"""

__version__ = "0.1.0"
