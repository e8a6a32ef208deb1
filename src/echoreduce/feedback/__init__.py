"""Error feedback along a pass: compensator (correction, residual, state) and rescale (the paper's power-of-two factor)."""
