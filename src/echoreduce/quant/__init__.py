"""Values to codes and back: grid (range -> scale, zero point or offset), codec (values <-> codes), packing (codes <-> bytes), rotation."""
