"""The commands of ``python -m attn_spec``; a module each."""
