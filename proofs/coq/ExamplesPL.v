(* The PL claims, applied where all their hypotheses hold: the identity in two blocks. *)
From Coq Require Import Reals Lra Psatz Lia PeanoNat.
From LCSB Require Import FinSum Formulas Vectors Blocks BlockDescent Quadratic BiasedCyclic PLCyclic PLRandom IdleLimit
  Statements ExamplesBlocks.
Open Scope R_scope.

(* the identity on R^2: f = |x|^2/2, mu = L = L_max = 1 *)
Definition eye (i j : nat) : R := if Nat.eqb i j then 1 else 0.
Lemma eye_symmetric i j : eye i j = eye j i.
Proof. unfold eye. rewrite Nat.eqb_sym. reflexivity. Qed.

Lemma eye_smooth : smooth_in_blocks 2 id_blk (quad 2 eye) (mv 2 eye) (fun i => eye i i) 1 (frobenius 2 eye).
Proof.
  assert (D : forall i, eye i i = 1) by (intros; unfold eye; rewrite Nat.eqb_refl; reflexivity).
  split; [apply quad_gradient, eye_symmetric|].
  split; [apply quad_block_lipschitz; intros i; rewrite D; lra|].
  split; [intros i; rewrite D; lra|]. split; [lra|]. split; [apply sqrt_pos|apply quad_lipschitz].
Qed.

Lemma eye_pl : pl 2 (quad 2 eye) (mv 2 eye) 1 0.
Proof. intros y. rewrite nrm_sq. unfold quad, dot, mv, eye. simpl. lra. Qed.

Lemma eye_below y : 0 <= quad 2 eye y.
Proof. unfold quad, dot, mv, eye. simpl. nra. Qed.

Example claim_pl_cyclic_met K : quad 2 eye (brun 2 (mv 2 eye) 1 (1 + 1 / 2) (K * 2)) - 0
  <= (1 - pl_cycle_rate 1 1 (frobenius 2 eye) 1 (1 / 2) 1) ^ K * (quad 2 eye start - 0).
Proof.
  apply (claim_pl_cyclic 2 1 id_blk (order 2) _ (mv 2 eye) _ 1 _ 1 (1 / 2) 1 0 (brun 2 (mv 2 eye) 1 (1 + 1 / 2)) (bgt 2 (mv 2 eye) 1 (1 + 1 / 2)) K
    eye_smooth); try lra.
  - apply eye_below.
  - apply eye_pl.
  - apply (brun_biased 2 2). lra.
  - apply (order_once 2).
Qed.

Example claim_pl_random_met T : expected 2 id_blk (quad 2 eye) (mv 2 eye) 1 T start - 0
  <= (1 - pl_random_rate 1 1 1 2) ^ T * (quad 2 eye start - 0).
Proof.
  apply (claim_pl_random 2 2 id_blk _ _ _ 1 _ 1 1 0 ltac:(lia) ltac:(auto) eye_smooth); try lra.
  - apply eye_pl.
  - unfold pl_random_rate. simpl. lra.
Qed.
