"""Machine-checked mathematics of LCSB: Coq proofs, the formulas they prove, sympy derivations, the audit."""
