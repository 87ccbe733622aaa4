(* T2, textbook form: c = (1 - delta) - a (1 + delta)^2/2 and the factor 2 (1 + p L^2 eta^2 (1 + delta)^2).
   It asks more (c > 0) and says less than the sharp form, from which it follows. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Vectors Blocks BlockDescent BiasedStep BiasedCyclic.
Open Scope R_scope.

Lemma textbook_below_sharp a delta : 0 <= delta <= 1 -> 0 <= a ->
  (1 - delta) - a * (1 + delta) ^ 2 / 2 <= sharp_coeff a delta.
Proof. intros Hd Ha. unfold sharp_coeff. apply Rmin_glb; nra. Qed.

Theorem textbook_cyclic : forall n q blk b f grad (Li : nat -> R) Lmax L eta delta fmin x gt K,
  block_smooth n blk f grad Li -> (forall i, Li i <= Lmax) -> 0 < Lmax -> 0 <= L -> lipschitz n grad L ->
  0 < eta -> 0 <= delta < 1 -> (forall y, fmin <= f y) ->
  biased_run n blk b grad eta delta x gt -> (forall k, visits_once n blk b (k * S q) (S q)) ->
  0 < (1 - delta) - Lmax * eta * (1 + delta) ^ 2 / 2 ->
  psum (fun k => nrm n (grad (x (k * S q)%nat)) ^ 2) K
    <= 2 * (1 + INR (S q) * L ^ 2 * eta ^ 2 * (1 + delta) ^ 2)
       * ((f (x 0%nat) - fmin) / (eta * ((1 - delta) - Lmax * eta * (1 + delta) ^ 2 / 2))).
Proof.
  intros n q blk b f grad Li Lmax L eta delta fmin x gt K Hs HLi HL L0 Hl He Hd Hf Hr Hv Hc.
  assert (A : 0 < eta * Lmax) by (apply Rmult_lt_0_compat; lra).
  pose proof (textbook_below_sharp (eta * Lmax) delta ltac:(lra) ltac:(lra)) as T.
  assert (C : 0 < sharp_coeff (eta * Lmax) delta) by lra.
  assert (small : eta * Lmax * (1 + delta) < 2) by (apply (sharp_positive (eta * Lmax) delta); assumption).
  eapply Rle_trans; [apply (biased_cyclic n blk b f grad Li Lmax L eta delta fmin x gt); eassumption|].
  specialize (Hf (x 0%nat)). apply Rmult_le_compat; [apply pow2_ge_0| | |].
  - apply div_nonneg; [lra|apply Rmult_lt_0_compat; assumption].
  - pose proof (sqrt_pos (INR q)) as Sq. pose proof (pow2_sqrt (INR q) (pos_INR q)) as S2.
    rewrite S_INR. pose proof (pow2_ge_0 (sqrt (INR q) * L * eta * (1 + delta) - 1)).
    pose proof (pow2_ge_0 (L * eta * (1 + delta))).
    assert ((sqrt (INR q) * L * eta * (1 + delta)) ^ 2 = INR q * (L * eta * (1 + delta)) ^ 2)
      by (rewrite <- S2 at 2; ring).
    nra.
  - apply Rmult_le_compat_l; [lra|]. apply Rinv_le_contravar; [apply Rmult_lt_0_compat; lra|].
    apply Rmult_le_compat_l; lra.
Qed.
