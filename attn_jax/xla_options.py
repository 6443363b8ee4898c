"""XLA options for programs run a few times: no CUDA graphs, no autotuning."""

# XLA records a program into a CUDA graph when it first runs. Nothing else may ask the
# driver for anything meanwhile, and other threads do: no program is large enough.
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**31 - 1}
# To try out what runs a program fastest takes longer than to run it once.
RUN_ONCE = NO_GRAPHS | {"xla_gpu_autotune_level": 0}
