(* T2 in angles: the surrogate of block i has norm rho |g| and cosine c with the exact block gradient g. *)
From Coq Require Import Reals Lra Psatz.
From LCSB Require Import FinSum Vectors Blocks BlockDescent.
Open Scope R_scope.

Theorem angle_step : forall n blk f grad (Li : nat -> R) eta rho cosine i x gt,
  block_smooth n blk f grad Li ->
  nrm n (proj blk i gt) = rho * nrm n (proj blk i (grad x)) ->
  dot n (proj blk i (grad x)) (proj blk i gt) = cosine * (nrm n (proj blk i (grad x)) * nrm n (proj blk i gt)) ->
  f (axpy x (- eta) (proj blk i gt))
    <= f x - eta * rho * (cosine - eta * Li i * rho / 2) * nrm n (proj blk i (grad x)) ^ 2.
Proof.
  intros n blk f grad Li eta rho cosine i x gt Hs HN HC.
  pose proof (Hs i x (- eta) gt) as S. rewrite HC, HN in S. lra.
Qed.

(* descent for every step below 2 cos/(L rho) whenever the cosine is positive *)
Theorem angle_limit : forall eta rho cosine L, 0 < eta -> 0 < rho -> 0 < L ->
  (0 < eta * rho * (cosine - eta * L * rho / 2) <-> eta < 2 * cosine / (L * rho)).
Proof.
  intros eta rho cosine L He Hr HL. assert (P : 0 < L * rho) by (apply Rmult_lt_0_compat; assumption).
  assert (Q : 0 < eta * rho) by (apply Rmult_lt_0_compat; assumption).
  assert (E : 2 * cosine / (L * rho) * (L * rho) = 2 * cosine) by (field; lra).
  split; intros H.
  - apply Rmult_lt_reg_r with (L * rho); [exact P|]. rewrite E. nra.
  - apply (Rmult_lt_compat_r _ _ _ P) in H. rewrite E in H. apply Rmult_lt_0_compat; lra.
Qed.
