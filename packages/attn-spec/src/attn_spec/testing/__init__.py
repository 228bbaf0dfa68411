"""Testing tools: byte comparison, named cases, Hypothesis strategies and the pytest plugin."""
