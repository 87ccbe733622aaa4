(* T6b, cycle average: the full gradients at the starts of K cycles. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Vectors Blocks BlockDescent BlockCycle FrozenMomentum.
Open Scope R_scope.

Theorem frozen_cycles : forall n q blk b f grad (Li : nat -> R) Lmax L eta beta fmin x m K,
  block_smooth n blk f grad Li -> (forall i, Li i <= Lmax) -> 0 <= L -> lipschitz n grad L ->
  0 < eta -> eta * Lmax < 2 -> 0 <= beta < 1 -> (forall y, fmin <= f y) ->
  frozen_momentum blk b grad eta beta x m -> nrm n (m 0%nat) = 0 ->
  (forall k, visits_once n blk b (k * S q) (S q)) ->
  psum (fun k => nrm n (grad (x (k * S q)%nat)) ^ 2) K
    <= ((1 + beta) / (1 - beta) + eta * L * sqrt (INR q)) ^ 2
       * ((f (x 0%nat) - fmin) / (eta * (1 - eta * Lmax / 2))).
Proof.
  intros n q blk b f grad Li Lmax L eta beta fmin x m K Hs HL L0 Hl He Hlt Hb Hf Hr Hm Hv.
  set (D := (f (x 0%nat) - fmin) / (eta * (1 - eta * Lmax / 2))).
  assert (D0 : 0 <= D) by (apply div_nonneg; [specialize (Hf (x 0%nat)); lra|apply Rmult_lt_0_compat; lra]).
  assert (r0 : 0 <= (1 + beta) / (1 - beta)) by (apply div_nonneg; lra).
  pose proof (sqrt_pos D) as SD.
  replace (((1 + beta) / (1 - beta) + eta * L * sqrt (INR q)) ^ 2 * D)
    with (((1 + beta) / (1 - beta) * sqrt D + L * eta * sqrt (INR q) * sqrt D) ^ 2).
  - apply (cycles_bound n q blk b grad L eta x (fun t => m (S t))); try assumption; try lra.
    + intros t. apply Hr.
    + apply Rmult_le_pos; assumption.
    + rewrite Rpow_mult_distr, pow2_sqrt by exact D0.
      apply (frozen_sum n blk b f grad Li Lmax eta beta fmin x m); assumption.
    + rewrite pow2_sqrt by exact D0.
      apply (sum_new n blk b f grad Li Lmax eta beta fmin x m); assumption.
  - transitivity (((1 + beta) / (1 - beta) + eta * L * sqrt (INR q)) ^ 2 * sqrt D ^ 2); [ring|].
    rewrite pow2_sqrt by exact D0. reflexivity.
Qed.
