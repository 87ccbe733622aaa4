(* The claims on vectors in blocks, applied where all their hypotheses hold: the coupled 3 x 3 quadratic of
   IdleLimit.v in three blocks (cyclic order). *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality PeanoNat.
From LCSB Require Import FinSum Formulas Vectors Blocks BlockDescent Quadratic BlockCycle FrozenMomentum BiasedStep
  BiasedCyclic PLCyclic PLRandom IdleMomentum IdleLimit Statements.
Open Scope R_scope.

Definition id_blk (j : nat) : nat := j.
Definition order (p t : nat) : nat := Nat.modulo t p.
Definition W := mv 3 witness.

Lemma order_cyclic p k i : (i < p)%nat -> order p (k * p + i)%nat = i.
Proof. intros H. unfold order. rewrite Nat.add_comm, Nat.mod_add, Nat.mod_small; lia. Qed.

Lemma order_once p k : visits_once p id_blk (order p) (k * p) p.
Proof. apply cyclic_visits_once; [auto|]. intros i. apply order_cyclic. Qed.

Lemma W_smooth : smooth_in_blocks 3 id_blk (quad 3 witness) W (fun i => witness i i) 1 (frobenius 3 witness).
Proof.
  split; [apply quad_gradient, witness_symmetric|].
  split; [apply quad_block_lipschitz; intros [|[|[|i]]]; simpl; lra|].
  split; [intros [|[|[|i]]]; simpl; lra|]. split; [lra|]. split; [apply sqrt_pos|apply quad_lipschitz].
Qed.

Lemma W_below y : 0 <= quad 3 witness y.
Proof.
  destruct (Rle_lt_or_eq_dec 0 (nrm 3 y) (nrm_nonneg 3 y)) as [H|H]; [left; apply witness_positive, H|].
  assert (Z : dot 3 y y = 0) by (rewrite <- nrm_sq, <- H; ring). unfold dot in Z. simpl in Z.
  assert (y 0%nat = 0) by nra. assert (y 1%nat = 0) by nra. assert (y 2%nat = 0) by nra.
  unfold quad, dot, mv. simpl. right. rewrite H0, H1, H2. field.
Qed.

(* runs of the three algorithms; any f, any eta *)
Fixpoint brun (p : nat) (grad : vec -> vec) (eta s : R) (t : nat) : vec :=
  match t with
  | O => start
  | S k => axpy (brun p grad eta s k) (- eta) (proj id_blk (order p k) (fun j => s * grad (brun p grad eta s k) j))
  end.

Definition bgt p grad eta s (t : nat) : vec := fun j => s * grad (brun p grad eta s t) j.

Lemma brun_biased n p grad eta delta : 0 <= delta ->
  biased_run n id_blk (order p) grad eta delta (brun p grad eta (1 + delta))
    (bgt p grad eta (1 + delta)).
Proof.
  intros Hd t. split; [reflexivity|].
  apply nrm_le_of_sq; [apply Rmult_le_pos; [exact Hd|apply nrm_nonneg]|].
  rewrite Rpow_mult_distr, nrm_sq. unfold dot. rewrite <- psum_scal. right. apply psum_ext. intros j _.
  unfold bgt, proj, vsub. destruct (Nat.eqb _ _); ring.
Qed.

Fixpoint irun (eta beta : R) (t : nat) : vec * vec :=
  match t with
  | O => (start, fun _ => 0)
  | S k => let (x, m) := irun eta beta k in
      let m' := axpy (fun j => beta * m j) (1 - beta) (proj id_blk (order 3 k) (W x)) in
      (axpy x (- eta) m', m')
  end.

Lemma irun_idle eta beta : idle_momentum id_blk (order 3) W eta beta
  (fun t => fst (irun eta beta t)) (fun t => snd (irun eta beta t)).
Proof. intros t. simpl. destruct (irun eta beta t) as [x m]. split; reflexivity. Qed.

Fixpoint frun (eta beta : R) (t : nat) : vec * vec :=
  match t with
  | O => (start, fun _ => 0)
  | S k => let (x, m) := frun eta beta k in
      let m' := fun j => if Nat.eqb (id_blk j) (order 3 k) then beta * m j + (1 - beta) * W x j else m j in
      (axpy x (- eta) (proj id_blk (order 3 k) m'), m')
  end.

Lemma frun_frozen eta beta : frozen_momentum id_blk (order 3) W eta beta
  (fun t => fst (frun eta beta t)) (fun t => snd (frun eta beta t)).
Proof. intros t. simpl. destruct (frun eta beta t) as [x m]. split; reflexivity. Qed.

Lemma zero_nrm n : nrm n (fun _ => 0) = 0.
Proof.
  unfold nrm, dot. rewrite (psum_ext _ (fun _ => 0)) by (intros; ring).
  rewrite psum_const, Rmult_0_r. apply sqrt_0.
Qed.

Lemma frobenius_le : frobenius 3 witness <= 25 / 10.
Proof.
  unfold frobenius. rewrite <- (sqrt_pow2 (25 / 10)) by lra. apply sqrt_le_1_alt. simpl. unfold coupling. lra.
Qed.

Example claim_block_descent_met : quad 3 witness (axpy start (- (1 / 2)) (proj id_blk 0%nat (W start)))
  <= quad 3 witness start - descent_coeff (1 / 2) 1 * nrm 3 (proj id_blk 0%nat (W start)) ^ 2.
Proof. apply (claim_block_descent 3 id_blk _ W (fun i => witness i i) 0%nat); apply W_smooth. Qed.

Example claim_quadratic_limit_met :
  quad 3 witness (axpy start (- (3 / 2)) (proj id_blk 0%nat (W start))) < quad 3 witness start.
Proof.
  destruct (claim_quadratic_limit 3 id_blk witness 0%nat start (3 / 2) 1 witness_symmetric ltac:(lra)) as [_ [_ D]].
  - apply functional_extensionality. intros [|[|[|j]]]; unfold proj, mv, start; simpl; ring.
  - unfold nrm, dot, proj, mv, start. simpl. apply sqrt_lt_R0. lra.
  - apply D. lra.
Qed.

Example claim_biased_block_met : quad 3 witness (axpy start (- 1) (proj id_blk 0%nat (fun j => (1 + 1 / 2) * W start j)))
  <= quad 3 witness start - 1 * sharp_constant (1 * 1) (1 / 2) * nrm 3 (proj id_blk 0%nat (W start)) ^ 2.
Proof.
  apply (claim_biased_block 3 id_blk _ W _ 1 _ 1 (1 / 2) 0%nat _ _ W_smooth); try lra.
  destruct (brun_biased 3 3 W 1 (1 / 2) ltac:(lra) 0%nat) as [_ B]. exact B.
Qed.

Example claim_sharp_positive_met : 0 < sharp_constant 1 (1 / 2).
Proof. apply (claim_sharp_positive 1 (1 / 2)); lra. Qed.

Example claim_sharp_attained_met : 1 ^ 2 / 2 < (1 - 2 * ((1 + 1 / 2) * 1)) ^ 2 / 2.
Proof. apply claim_sharp_attained; lra. Qed.

Example claim_biased_one_cycle_met : nrm 3 (W start) ^ 2 <= cycle_factor (frobenius 3 witness) 1 (1 / 2) 2
  * psum (fun i => nrm 3 (proj id_blk (order 3 (0 + i)) (W (brun 3 W 1 (1 + 1 / 2) (0 + i)))) ^ 2) 3.
Proof.
  pose proof (claim_biased_one_cycle 3 id_blk (order 3) W (frobenius 3 witness) 1 (1 / 2) (brun 3 W 1 (1 + 1 / 2)) _
    ltac:(lra) ltac:(lra) (brun_biased 3 3 W 1 (1 / 2) ltac:(lra)) (sqrt_pos _) (quad_lipschitz 3 witness) 2%nat 0%nat
    (order_once 3 0)) as C. exact C.
Qed.

Example claim_biased_cyclic_met K :
  psum (fun k => nrm 3 (W (brun 3 W 1 (1 + 1 / 2) (k * 3))) ^ 2) K
    <= cycle_bound (quad 3 witness start) 0 1 (frobenius 3 witness) 1 (1 / 2) 2.
Proof.
  apply (claim_biased_cyclic 3 2 id_blk (order 3) _ W _ 1 _ 1 (1 / 2) 0 (brun 3 W 1 (1 + 1 / 2)) (bgt 3 W 1 (1 + 1 / 2)) K W_smooth); try lra.
  - apply W_below.
  - apply (brun_biased 3 3). lra.
  - apply (order_once 3).
Qed.

Example claim_textbook_cyclic_met K :
  psum (fun k => nrm 3 (W (brun 3 W (1 / 3) (1 + 1 / 4) (k * 3))) ^ 2) K
    <= textbook_bound (quad 3 witness start) 0 1 (frobenius 3 witness) (1 / 3) (1 / 4) 3.
Proof.
  apply (claim_textbook_cyclic 3 2 id_blk (order 3) _ W _ 1 _ (1 / 3) (1 / 4) 0 (brun 3 W (1 / 3) (1 + 1 / 4)) (bgt 3 W (1 / 3) (1 + 1 / 4)) K W_smooth);
    try lra.
  - apply W_below.
  - apply (brun_biased 3 3). lra.
  - apply (order_once 3).
Qed.

(* a surrogate along the gradient: rho = 2, cosine 1 *)
Example claim_angle_met : quad 3 witness (axpy start (- (1 / 2)) (proj id_blk 0%nat (fun j => 2 * W start j)))
  <= quad 3 witness start - angle_coeff (1 / 2) 1 2 1 * nrm 3 (proj id_blk 0%nat (W start)) ^ 2.
Proof.
  apply (claim_angle 3 id_blk _ W (fun i => witness i i) (1 / 2) 2 1 0%nat); try apply W_smooth.
  - rewrite nrm_scaled, Rabs_pos_eq by lra. reflexivity.
  - rewrite nrm_scaled, Rabs_pos_eq by lra.
    replace (1 * (nrm 3 (proj id_blk 0%nat (W start)) * (2 * nrm 3 (proj id_blk 0%nat (W start)))))
      with (2 * nrm 3 (proj id_blk 0%nat (W start)) ^ 2) by ring.
    rewrite nrm_sq. unfold dot. rewrite <- psum_scal. apply psum_ext. intros j _. unfold proj.
    destruct (Nat.eqb (id_blk j) 0); ring.
Qed.
