(* T2. Descent with a biased gradient, on vectors of R^n. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Vectors.
Open Scope R_scope.

Section Biased.
Variables (n : nat) (f : vec -> R) (x g gt : vec) (L eta delta : R).
Hypothesis L_pos   : 0 < L.
Hypothesis eta_pos : 0 < eta.
Hypothesis delta01 : 0 <= delta < 1.
(* the quadratic upper bound of an L-smooth f at x, with gradient g *)
Hypothesis smooth  : forall y,
  f y <= f x + dot n g (vsub y x) + L / 2 * nrm n (vsub y x) ^ 2.
Hypothesis bias    : nrm n (vsub gt g) <= delta * nrm n g.

Let step : vec := axpy x (- eta) gt.               (* x - eta * gt *)

Lemma inner_lower : (1 - delta) * nrm n g ^ 2 <= dot n g gt.
Proof.
  assert (E : dot n g gt = dot n g g + dot n g (vsub gt g)).
  { unfold dot, vsub. rewrite <- psum_plus. apply psum_ext. intros; ring. }
  pose proof (cauchy_schwarz n g (vsub gt g)) as C.
  pose proof (nrm_nonneg n g). rewrite nrm_sq, E.
  assert (nrm n g * nrm n (vsub gt g) <= delta * dot n g g)
    by (rewrite <- nrm_sq; nra).
  pose proof (Rle_abs (- dot n g (vsub gt g))). rewrite Rabs_Ropp in *. lra.
Qed.

Lemma norm_upper : nrm n gt ^ 2 <= (1 + delta) ^ 2 * nrm n g ^ 2.
Proof.
  assert (E : dot n gt gt
              = dot n g g + 2 * dot n g (vsub gt g) + dot n (vsub gt g) (vsub gt g)).
  { unfold dot, vsub. rewrite <- !psum_scal, <- !psum_plus.
    apply psum_ext. intros; ring. }
  pose proof (cauchy_schwarz n g (vsub gt g)) as C.
  pose proof (nrm_nonneg n g) as G. pose proof (nrm_nonneg n (vsub gt g)) as D.
  rewrite (nrm_sq n gt), E, <- !nrm_sq.
  pose proof (Rle_abs (dot n g (vsub gt g))).
  assert (nrm n g * nrm n (vsub gt g) <= delta * nrm n g ^ 2) by nra.
  assert (nrm n (vsub gt g) ^ 2 <= delta ^ 2 * nrm n g ^ 2)
    by (rewrite <- Rpow_mult_distr; apply pow_incr; lra).
  lra.
Qed.

Theorem biased_descent :
  f step <= f x - eta * ((1 - delta) - L * eta * (1 + delta) ^ 2 / 2) * nrm n g ^ 2.
Proof.
  assert (E1 : dot n g (vsub step x) = - eta * dot n g gt).
  { unfold dot, vsub, step, axpy. rewrite <- psum_scal. apply psum_ext. intros; ring. }
  assert (E2 : nrm n (vsub step x) ^ 2 = eta ^ 2 * nrm n gt ^ 2).
  { rewrite !nrm_sq. unfold dot, vsub, step, axpy. rewrite <- psum_scal.
    apply psum_ext. intros; ring. }
  pose proof (smooth step) as S. rewrite E1, E2 in S.
  pose proof inner_lower as I. pose proof norm_upper as U.
  apply (Rmult_le_compat_l eta) in I; [|lra].
  apply (Rmult_le_compat_l (L / 2 * eta ^ 2)) in U; [lra|nra].
Qed.

Theorem biased_descent_stepsize :
  eta < 2 * (1 - delta) / (L * (1 + delta) ^ 2) ->
  f step <= f x /\ (0 < nrm n g -> f step < f x).
Proof.
  intros He. pose proof biased_descent as B.
  assert (P : 0 < L * (1 + delta) ^ 2)
    by (apply Rmult_lt_0_compat; [|apply pow_lt]; lra).
  apply (Rmult_lt_compat_r _ _ _ P) in He.
  replace (2 * (1 - delta) / (L * (1 + delta) ^ 2) * (L * (1 + delta) ^ 2))
    with (2 * (1 - delta)) in He by (field; split; lra).
  assert (Q : 0 < eta * (1 - delta - L * eta * (1 + delta) ^ 2 / 2))
    by (apply Rmult_lt_0_compat; lra).
  pose proof (nrm_nonneg n g) as G.
  split; [|intros Hg].
  - pose proof (pow2_ge_0 (nrm n g)). nra.
  - pose proof (pow_lt (nrm n g) 2 Hg). nra.
Qed.
End Biased.
