(* From the gradients used inside cycles to the full gradient at the start of each cycle.
   Moves -eta d t on the block of step t, each block once a cycle of p = q + 1 steps, L-Lipschitz gradient:
     sum_k |grad f (x^k)|^2 <= (G + L eta sqrt q E)^2
   where G^2 bounds the sum of the squared block gradients met on the way and E^2 that of the squared moves. *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From LCSB Require Import FinSum Vectors Blocks BlockDescent CyclicBound.
Open Scope R_scope.

Section Cycle.
Variables (n q : nat) (blk b : nat -> nat) (grad : vec -> vec) (L eta : R) (x d : nat -> vec).
Hypothesis L_nonneg : 0 <= L.
Hypothesis eta_nonneg : 0 <= eta.
Hypothesis lip : lipschitz n grad L.
Hypothesis step : forall t, x (S t) = axpy (x t) (- eta) (proj blk (b t) (d t)).

Let move t := nrm n (proj blk (b t) (d t)).
Let used t := nrm n (proj blk (b t) (grad (x t))).

Lemma untouched s j i : (forall k, (k < i)%nat -> b (s + k)%nat <> blk j) -> x (s + i)%nat j = x s j.
Proof.
  induction i as [|i IH]; intros H; [f_equal; f_equal; lia|].
  rewrite Nat.add_succ_r, step. unfold axpy, proj.
  destruct (Nat.eqb_spec (blk j) (b (s + i)%nat)) as [E|_].
  - exfalso. apply (H i); auto.
  - rewrite IH by (intros k Hk; apply H; lia). ring.
Qed.

(* blocks are orthogonal, so the squared moves add up *)
Lemma travelled s i : visits_once n blk b s (S q) -> (i <= S q)%nat ->
  nrm n (vsub (x (s + i)%nat) (x s)) ^ 2 = eta ^ 2 * psum (fun k => move (s + k)%nat ^ 2) i.
Proof.
  intros V. induction i as [|i IH]; intros Hi.
  - rewrite Nat.add_0_r, nrm_sq. unfold dot, vsub.
    rewrite (psum_ext _ (fun _ => 0)) by (intros; ring). rewrite psum_const. simpl. ring.
  - rewrite psum_S, Rmult_plus_distr_l, <- IH by lia.
    replace (vsub (x (s + S i)%nat) (x s))
      with (axpy (vsub (x (s + i)%nat) (x s)) (- eta) (proj blk (b (s + i)%nat) (d (s + i)%nat)))
      by (rewrite Nat.add_succ_r, step; apply functional_extensionality; intros j;
          unfold vsub, axpy; ring).
    rewrite nrm_sq, dot_axpy_sq, <- !nrm_sq. fold (move (s + i)).
    replace (dot n (vsub (x (s + i)%nat) (x s)) (proj blk (b (s + i)%nat) (d (s + i)%nat))) with 0; [ring|].
    symmetry. unfold dot. rewrite (psum_ext _ (fun _ => 0)); [rewrite psum_const; ring|].
    intros j Hj. unfold proj. destruct (Nat.eqb_spec (blk j) (b (s + i)%nat)) as [E|_]; [|ring].
    unfold vsub. rewrite untouched; [ring|].
    intros k Hk F. destruct (V j Hj) as [i0 [_ [_ U]]].
    assert (k = i0) by (apply U; [lia|exact F]). assert (i = i0) by (apply U; [lia|auto]). lia.
Qed.

Theorem one_cycle_bound s : visits_once n blk b s (S q) ->
  nrm n (grad (x s)) <= sqrt (psum (fun i => used (s + i)%nat ^ 2) (S q))
    + L * eta * sqrt (INR q) * sqrt (psum (fun i => move (s + i)%nat ^ 2) (S q)).
Proof.
  intros V. set (a := fun i => move (s + i)%nat ^ 2). set (u := fun i => used (s + i)%nat ^ 2).
  assert (Ha : forall i, 0 <= a i) by (intros; apply pow2_ge_0).
  assert (Hu : 0 <= psum u (S q)) by (apply psum_nonneg; intros; apply pow2_ge_0).
  assert (HA : forall i, 0 <= psum a i) by (intros; apply psum_nonneg; auto).
  pose proof (sqrt_pos (psum u (S q))) as P1. pose proof (sqrt_pos (psum a (S q))) as P2.
  pose proof (sqrt_pos (INR q)) as P3. pose proof (pos_INR q) as Q0.
  assert (LE : 0 <= L * eta) by (apply Rmult_le_pos; assumption).
  assert (P4 : 0 <= L * eta * sqrt (INR q) * sqrt (psum a (S q)))
    by (repeat (apply Rmult_le_pos; try assumption)).
  apply nrm_le_of_sq; [lra|]. rewrite <- nrm_sq, <- (cycle_pythagoras n blk b s (S q)) by exact V.
  apply (minkowski (S q) _ (fun i => used (s + i)%nat) (fun i => L * eta * sqrt (psum a i))); try assumption.
  - intros i Hi. split; [apply nrm_nonneg|].
    replace (proj blk (b (s + i)%nat) (grad (x s)))
      with (axpy (proj blk (b (s + i)%nat) (grad (x (s + i)%nat))) (-1)
            (proj blk (b (s + i)%nat) (vsub (grad (x (s + i)%nat)) (grad (x s)))))
      by (apply functional_extensionality; intros j; unfold axpy, proj, vsub;
          destruct (Nat.eqb (blk j) (b (s + i)%nat)); ring).
    eapply Rle_trans; [apply nrm_axpy|]. fold (used (s + i)). apply Rplus_le_compat_l.
    replace (Rabs (-1)) with 1 by (rewrite Rabs_left; lra). rewrite Rmult_1_l.
    eapply Rle_trans; [apply nrm_proj_le|]. eapply Rle_trans; [apply lip|].
    rewrite Rmult_assoc. apply Rmult_le_compat_l; [assumption|].
    apply nrm_le_of_sq; [apply Rmult_le_pos; [assumption|apply sqrt_pos]|].
    rewrite <- nrm_sq, travelled by (assumption || lia).
    rewrite Rpow_mult_distr, pow2_sqrt by apply HA. apply Rle_refl.
  - rewrite pow2_sqrt by exact Hu. apply Rle_refl.
  - rewrite (psum_ext _ (fun i => (L * eta) ^ 2 * psum a i))
      by (intros i _; rewrite Rpow_mult_distr, pow2_sqrt by apply HA; reflexivity).
    rewrite psum_scal, !(Rpow_mult_distr (L * eta * sqrt (INR q))), (Rpow_mult_distr (L * eta)), !pow2_sqrt
      by (assumption || apply HA).
    rewrite Rmult_assoc. apply Rmult_le_compat_l; [apply pow2_ge_0|].
    eapply Rle_trans; [apply psum_psum_le; exact Ha|].
    apply Rmult_le_compat_l; [assumption|]. apply psum_incr; auto.
Qed.

Theorem cycles_bound K G E : 0 <= G -> 0 <= E ->
  (forall k, visits_once n blk b (k * S q) (S q)) ->
  psum (fun t => used t ^ 2) (K * S q) <= G ^ 2 -> psum (fun t => move t ^ 2) (K * S q) <= E ^ 2 ->
  psum (fun k => nrm n (grad (x (k * S q)%nat)) ^ 2) K <= (G + L * eta * sqrt (INR q) * E) ^ 2.
Proof.
  intros HG HE V HU HM. pose proof (sqrt_pos (INR q)) as P3.
  apply (minkowski_cycles _ used move (S q) K); try assumption.
  - repeat (apply Rmult_le_pos; try assumption).
  - intros k. split; [apply nrm_nonneg|]. apply one_cycle_bound, V.
Qed.
End Cycle.
