"""Backends over real processes: c10d (any torch.distributed group) and p2p (Triton kernels over peer memory), one interface."""
