(* Every claim of Statements.v, applied where all its hypotheses hold: none is vacuous. *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum Formulas Vectors DescentLemma MomentumStability IdentityPath Statements.
Open Scope R_scope.

(* f x = x^2/2 from x = 1 with eta = 1/2: f0 = 1/2, f1 = 1/8, gradient 1 *)
Example claim_descent_met : 1 / 8 <= 1 / 2 - descent_coeff (1 / 2) 1 * 1 /\ 1 / 8 <= 1 / 2.
Proof. apply (claim_descent (1 / 2) (1 / 8) 1 (1 / 2) 1); lra. Qed.

Example claim_telescope_met : exists t, (t < 3)%nat /\ (fun t => (1 / 2) ^ t) t <= telescope_bound 1 0 (1 / 2) 3.
Proof.
  apply (claim_telescope (fun t => (1 / 2) ^ t) (fun t => (1 / 2) ^ t) 0 (1 / 2)); try lra; try lia.
  - intros t. apply pow_le. lra.
  - intros t. simpl. lra.
Qed.

Example claim_pl_met : (1 / 2) ^ 5 - 0 <= pl_bound ((1 / 2) ^ 0) 0 (1 / 2) 5.
Proof. apply (claim_pl (fun t => (1 / 2) ^ t)); [lra|]. intros t. simpl. lra. Qed.

Example claim_cyclic_met :
  psum (fun _ => 1 ^ 2) 2 <= cyclic_factor 2 1 1 * psum (fun _ => 1 ^ 2) 2.
Proof.
  apply (claim_cyclic 2 1 1 (fun _ => 1) (fun _ => 1)). intros i _.
  rewrite Rminus_eq_0, Rabs_R0. pose proof (sqrt_pos (psum (fun _ => 1 ^ 2) 2)). lra.
Qed.

(* m and x both halve: x - eta m' with eta = 1 *)
Example claim_coast_met : (1 / 2) ^ 3 = coast_position ((1 / 2) ^ 0) ((1 / 2) ^ 0) 1 (1 / 2) 3.
Proof.
  apply (claim_coast (fun t => (1 / 2) ^ t) (fun t => (1 / 2) ^ t)); [lra| |];
    intros t _; simpl; lra.
Qed.

Example claim_coast_limit_met :
  is_lim_seq (fun t => (1 / 2) ^ t) (coast_limit ((1 / 2) ^ 0) ((1 / 2) ^ 0) 1 (1 / 2)).
Proof.
  apply (claim_coast_limit (fun t => (1 / 2) ^ t) (fun t => (1 / 2) ^ t)).
  - rewrite Rabs_right; lra.
  - intros t. simpl. lra.
  - intros t. simpl. lra.
Qed.

Example claim_true_grad_met : is_derive (loss 3 (-2)) 5 (-3).
Proof. replace (-3) with (true_grad_a 3 (-2)) by (unfold true_grad_a; ring). apply claim_true_grad. Qed.

(* f x = x^2/2 on R^1 at x = 1, surrogate 3/2 instead of 1 *)
Example claim_biased_met : let f := fun x : vec => x 0%nat ^ 2 / 2 in
  f (axpy (fun _ => 1) (- (1 / 4)) (fun _ => 3 / 2))
    <= f (fun _ => 1) - biased_coeff (1 / 4) 1 (1 / 2) * nrm 1 (fun _ => 1) ^ 2.
Proof.
  intros f. apply (claim_biased 1 f (fun _ => 1) (fun _ => 1) (fun _ => 3 / 2)); try lra.
  - intros y. rewrite nrm_sq. unfold f, dot, vsub. simpl. nra.
  - unfold nrm, dot, vsub. simpl.
    replace (0 + (3 / 2 - 1) * (3 / 2 - 1)) with ((1 / 2) ^ 2) by field.
    replace (0 + 1 * 1) with (1 ^ 2) by ring. rewrite !sqrt_pow2; lra.
Qed.

Example claim_biased_step_met : let f := fun x : vec => x 0%nat ^ 2 / 2 in
  f (axpy (fun _ => 1) (- (1 / 4)) (fun _ => 3 / 2)) <= f (fun _ => 1) /\
  (0 < nrm 1 (fun _ => 1) -> f (axpy (fun _ => 1) (- (1 / 4)) (fun _ => 3 / 2)) < f (fun _ => 1)).
Proof.
  intros f.
  apply (claim_biased_step 1 f (fun _ => 1) (fun _ => 1) (fun _ => 3 / 2) 1 (1 / 4) (1 / 2)); try lra.
  - intros y. rewrite nrm_sq. unfold f, dot, vsub. simpl. nra.
  - unfold nrm, dot, vsub. simpl.
    replace (0 + (3 / 2 - 1) * (3 / 2 - 1)) with ((1 / 2) ^ 2) by field.
    replace (0 + 1 * 1) with (1 ^ 2) by ring. rewrite !sqrt_pow2; lra.
  - unfold biased_step_max. lra.
Qed.

Example claim_stable_met :
  forall z, is_root (momentum_trace (9 / 10) 37 1) (9 / 10) z -> Cmod z < 1.
Proof. apply (claim_stable (9 / 10) 37 1); [lra|]. unfold momentum_edge. lra. Qed.
