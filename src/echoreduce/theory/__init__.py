"""Every bound of the paper as a function that returns its number, and the simulations that judge them. No torch: real models are measured
by `integrations.estimate`.

weights        w_r, T_m, phi_m, mu_w, tau_2 in closed form
source         Theorem 1, Eq. 21, variance forms: the partial sums S_t
stream         the compensator's recurrence, simulated; constant, random and adversarial errors
bounds         Lemmas 4 to 6, Theorem 2, Corollary 1, Remark 2: the first-order output deviation
remainder      Proposition 1, Corollary 2: the second order
network        Lemmas 2 and 3; C_0 and Lambda from Jacobians
measured       Theorem 2 from measured energies, without R1 and R2, one q a site
constructions  Proposition 2: the amplifying and the coherent network, run
backward       Proposition 3
residuals      group against local residual: how q depends on the compensator
"""
