(* T2 whole: K cycles of biased block coordinate descent, sharp form and the weaker textbook form. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Vectors Blocks BlockDescent BlockCycle BiasedStep.
Open Scope R_scope.

(* step t moves the block b t along gt t, whose relative error on that block is at most delta *)
Definition biased_run n (blk b : nat -> nat) (grad : vec -> vec) (eta delta : R) (x gt : nat -> vec) : Prop :=
  forall t, x (S t) = axpy (x t) (- eta) (proj blk (b t) (gt t)) /\
    nrm n (proj blk (b t) (vsub (gt t) (grad (x t)))) <= delta * nrm n (proj blk (b t) (grad (x t))).

Section Biased.
Variables (n : nat) (blk b : nat -> nat) (f : vec -> R) (grad : vec -> vec) (Li : nat -> R).
Variables (Lmax L eta delta fmin : R) (x gt : nat -> vec).
Hypothesis smooth : block_smooth n blk f grad Li.
Hypothesis Li_le : forall i, Li i <= Lmax.
Hypothesis eta_pos : 0 < eta.
Hypothesis delta01 : 0 <= delta < 1.
Hypothesis run : biased_run n blk b grad eta delta x gt.
Let used t := nrm n (proj blk (b t) (grad (x t))).

Lemma biased_decrease t : f (x (S t)) <= f (x t) - eta * sharp_coeff (eta * Lmax) delta * used t ^ 2.
Proof.
  destruct (run t) as [-> Hb].
  apply (biased_block_step n blk f grad Li Lmax eta delta (b t) (x t) (gt t)); auto. lra.
Qed.

Lemma biased_decreases s T : f (x (s + T)%nat) <= f (x s)
  - eta * sharp_coeff (eta * Lmax) delta * psum (fun i => used (s + i)%nat ^ 2) T.
Proof.
  induction T as [|T IH]; [rewrite Nat.add_0_r; simpl; lra|].
  rewrite Nat.add_succ_r, psum_S. pose proof (biased_decrease (s + T)). lra.
Qed.

Hypothesis L_nonneg : 0 <= L.
Hypothesis lip : lipschitz n grad L.

Lemma moves_le t : nrm n (proj blk (b t) (gt t)) ^ 2 <= (1 + delta) ^ 2 * used t ^ 2.
Proof.
  destruct (run t) as [_ Hb]. rewrite <- Rpow_mult_distr. apply pow_incr. split; [apply nrm_nonneg|].
  replace (proj blk (b t) (gt t)) with
    (axpy (proj blk (b t) (grad (x t))) 1 (proj blk (b t) (vsub (gt t) (grad (x t)))))
    by (apply FunctionalExtensionality.functional_extensionality; intros j; unfold axpy, proj, vsub;
        destruct (Nat.eqb (blk j) (b t)); ring).
  eapply Rle_trans; [apply nrm_axpy|]. rewrite Rabs_R1. fold (used t). fold (used t) in Hb. lra.
Qed.

Let factor q := 1 + sqrt (INR q) * L * eta * (1 + delta).

(* one cycle from step s *)
Theorem biased_one_cycle q s : visits_once n blk b s (S q) ->
  nrm n (grad (x s)) ^ 2 <= factor q ^ 2 * psum (fun i => used (s + i)%nat ^ 2) (S q).
Proof.
  intros V. set (U := psum (fun i => used (s + i)%nat ^ 2) (S q)).
  assert (U0 : 0 <= U) by (apply psum_nonneg; intros; apply pow2_ge_0).
  rewrite <- (pow2_sqrt U U0), <- Rpow_mult_distr. apply pow_incr. split; [apply nrm_nonneg|].
  pose proof (one_cycle_bound n q blk b grad L eta x gt L_nonneg (Rlt_le _ _ eta_pos) lip
    (fun t => proj1 (run t)) s V) as C. fold U in C.
  eapply Rle_trans; [exact C|]. unfold factor. rewrite Rmult_plus_distr_r, Rmult_1_l.
  apply Rplus_le_compat_l.
  apply Rle_trans with (L * eta * sqrt (INR q) * ((1 + delta) * sqrt U)); [|right; ring].
  pose proof (sqrt_pos (INR q)). pose proof (sqrt_pos U).
  apply Rmult_le_compat_l; [repeat apply Rmult_le_pos; lra|].
  apply Rsqr_incr_0_var; [|apply Rmult_le_pos; lra].
  rewrite !Rsqr_pow2, pow2_sqrt, Rpow_mult_distr, pow2_sqrt
    by (assumption || (apply psum_nonneg; intros; apply pow2_ge_0)).
  unfold U. rewrite <- psum_scal. apply psum_le. intros i _. apply moves_le.
Qed.

Hypothesis below : forall y, fmin <= f y.
Hypothesis small : eta * Lmax * (1 + delta) < 2.
Hypothesis Lmax_pos : 0 < Lmax.

Lemma c_pos : 0 < eta * sharp_coeff (eta * Lmax) delta.
Proof.
  apply Rmult_lt_0_compat; [lra|]. apply sharp_positive; auto. apply Rmult_lt_0_compat; lra.
Qed.

Theorem biased_cyclic q K : (forall k, visits_once n blk b (k * S q) (S q)) ->
  psum (fun k => nrm n (grad (x (k * S q)%nat)) ^ 2) K
    <= factor q ^ 2 * ((f (x 0%nat) - fmin) / (eta * sharp_coeff (eta * Lmax) delta)).
Proof.
  intros V. pose proof c_pos as C.
  eapply Rle_trans; [apply psum_le; intros k _; apply biased_one_cycle, V|].
  rewrite psum_scal. apply Rmult_le_compat_l; [apply pow2_ge_0|].
  rewrite <- (psum_cycles (fun t => used t ^ 2)).
  apply Rmult_le_reg_l with (eta * sharp_coeff (eta * Lmax) delta); [exact C|].
  pose proof (biased_decreases 0 (K * S q)) as D.
  rewrite Nat.add_0_l in D. change (fun i => used (0 + i)%nat ^ 2) with (fun t => used t ^ 2) in D. specialize (below (x (K * S q)%nat)).
  replace (eta * sharp_coeff (eta * Lmax) delta * ((f (x 0%nat) - fmin) / (eta * sharp_coeff (eta * Lmax) delta)))
    with (f (x 0%nat) - fmin) by (field; split; intros E; rewrite E in C; lra).
  lra.
Qed.
End Biased.
