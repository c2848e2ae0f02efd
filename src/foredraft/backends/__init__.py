"""How forward passes are made: by the model as it is, by kernels on a CPU, by compiled layers, from recordings, with FlexAttention."""
