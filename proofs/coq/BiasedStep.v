(* T2, one step, the sharp constant: block i moves along gt with |gt - g| <= delta |g|, g the exact block
   gradient. The decrease is at least eta c |g|^2 with
     c = min ((1 - delta) (1 - a (1 - delta)/2), (1 + delta) (1 - a (1 + delta)/2)),  a = eta L_max,
   positive exactly when eta L_max (1 + delta) < 2; just above that a step on x^2/2 ascends. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Vectors Blocks BlockDescent.
Open Scope R_scope.

Definition sharp_coeff (a delta : R) : R :=
  Rmin ((1 - delta) * (1 - a * (1 - delta) / 2)) ((1 + delta) * (1 - a * (1 + delta) / 2)).

(* on scalars: u = |g|, v = |gt|, d = <g, gt> *)
Lemma sharp_scalar a delta u v d : 0 <= u -> 0 <= v -> 0 <= delta <= 1 ->
  (1 - delta) * u <= v <= (1 + delta) * u -> v ^ 2 + (1 - delta ^ 2) * u ^ 2 <= 2 * d ->
  sharp_coeff a delta * u ^ 2 <= d - a / 2 * v ^ 2.
Proof.
  intros Hu Hv Hd [H1 H2] H. unfold sharp_coeff.
  set (A := (1 - delta) * (1 - a * (1 - delta) / 2)). set (B := (1 + delta) * (1 - a * (1 + delta) / 2)).
  pose proof (pow2_ge_0 u) as U2.
  destruct (Rle_lt_dec a 1) as [Ha|Ha].
  - apply Rle_trans with (A * u ^ 2); [apply Rmult_le_compat_r; [lra|apply Rmin_l]|]. unfold A.
    assert ((1 - delta) ^ 2 * u ^ 2 <= v ^ 2)
      by (rewrite <- Rpow_mult_distr; apply pow_incr; split; [apply Rmult_le_pos; lra|lra]).
    nra.
  - apply Rle_trans with (B * u ^ 2); [apply Rmult_le_compat_r; [lra|apply Rmin_r]|]. unfold B.
    assert (v ^ 2 <= (1 + delta) ^ 2 * u ^ 2) by (rewrite <- Rpow_mult_distr; apply pow_incr; lra).
    nra.
Qed.

Lemma sharp_positive a delta : 0 <= delta < 1 -> 0 < a ->
  (0 < sharp_coeff a delta <-> a * (1 + delta) < 2).
Proof.
  intros Hd Ha. unfold sharp_coeff. split; intros H.
  - pose proof (Rmin_r ((1 - delta) * (1 - a * (1 - delta) / 2)) ((1 + delta) * (1 - a * (1 + delta) / 2))).
    assert (0 < (1 + delta) * (1 - a * (1 + delta) / 2)) by lra. nra.
  - apply Rmin_glb_lt; apply Rmult_lt_0_compat; nra.
Qed.

Theorem biased_block_step : forall n blk f grad (Li : nat -> R) Lmax eta delta i x gt,
  block_smooth n blk f grad Li -> Li i <= Lmax -> 0 < eta -> 0 <= delta <= 1 ->
  nrm n (proj blk i (vsub gt (grad x))) <= delta * nrm n (proj blk i (grad x)) ->
  f (axpy x (- eta) (proj blk i gt))
    <= f x - eta * sharp_coeff (eta * Lmax) delta * nrm n (proj blk i (grad x)) ^ 2.
Proof.
  intros n blk f grad Li Lmax eta delta i x gt Hs HL He Hd Hb.
  pose proof (Hs i x (- eta) gt) as S. rewrite proj_vsub in Hb.
  set (g := proj blk i (grad x)) in *. set (w := proj blk i gt) in *.
  pose proof (nrm_nonneg n g) as G. pose proof (nrm_nonneg n w) as W.
  pose proof (nrm_nonneg n (vsub w g)) as Z.
  assert (Q : nrm n w ^ 2 + (1 - delta ^ 2) * nrm n g ^ 2 <= 2 * dot n g w).
  { assert (B2 : nrm n (vsub w g) ^ 2 <= delta ^ 2 * nrm n g ^ 2)
      by (rewrite <- Rpow_mult_distr; apply pow_incr; lra).
    replace (vsub w g) with (axpy w (-1) g) in B2
      by (apply FunctionalExtensionality.functional_extensionality; intros; unfold axpy, vsub; ring).
    rewrite nrm_sq, dot_axpy_sq, <- !nrm_sq, (dot_comm n w g) in B2. lra. }
  assert (V : (1 - delta) * nrm n g <= nrm n w <= (1 + delta) * nrm n g).
  { split.
    - pose proof (nrm_axpy n w (-1) (vsub w g)) as T.
      replace (axpy w (-1) (vsub w g)) with g in T
        by (apply FunctionalExtensionality.functional_extensionality; intros; unfold axpy, vsub; ring).
      replace (Rabs (-1)) with 1 in T by (rewrite Rabs_left; lra). lra.
    - pose proof (nrm_axpy n g 1 (vsub w g)) as T.
      replace (axpy g 1 (vsub w g)) with w in T
        by (apply FunctionalExtensionality.functional_extensionality; intros; unfold axpy, vsub; ring).
      rewrite Rabs_R1 in T. lra. }
  pose proof (sharp_scalar (eta * Lmax) delta (nrm n g) (nrm n w) (dot n g w) G W Hd V Q) as C.
  apply (Rmult_le_compat_l eta) in C; [|lra].
  assert (Li i / 2 * (- eta) ^ 2 * nrm n w ^ 2 <= Lmax / 2 * eta ^ 2 * nrm n w ^ 2).
  { replace ((- eta) ^ 2) with (eta ^ 2) by ring. apply Rmult_le_compat_r; [apply pow2_ge_0|].
    apply Rmult_le_compat_r; [apply pow2_ge_0|]. lra. }
  lra.
Qed.

(* the limit is exact: on x^2/2 (L = 1) the surrogate (1 + delta) x is allowed and ascends above it *)
Theorem sharp_attained : forall eta delta x : R, 0 <= delta -> x <> 0 -> 2 < eta * (1 + delta) ->
  x ^ 2 / 2 < (x - eta * ((1 + delta) * x)) ^ 2 / 2.
Proof.
  intros eta delta x Hd Hx H.
  replace ((x - eta * ((1 + delta) * x)) ^ 2 / 2) with ((eta * (1 + delta) - 1) ^ 2 * x ^ 2 / 2) by field.
  assert (0 < x ^ 2) by (rewrite <- Rsqr_pow2; apply Rlt_0_sqr; exact Hx).
  assert (1 < (eta * (1 + delta) - 1) ^ 2) by nra. nra.
Qed.
