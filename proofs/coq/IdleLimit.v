(* T5: idle momentum does not keep block descent's limit 2/L_max. One positive definite 3 x 3 matrix with unit
   diagonal (so L_max = 1), three blocks of one coordinate, eta = 27/14 < 2, beta = 3/10, m = 0 at the start:
   the iterates are unbounded. The certificate is a left eigenvector of the cycle map with eigenvalue
   -(21/20)^3. On the same problem frozen idle momentum and plain block descent converge (T6b, T1). *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From LCSB Require Import FinSum Vectors Blocks BlockDescent Quadratic IdleMomentum.
Open Scope R_scope.

Definition coupling : R := 6737 / 15155.
Definition witness (i j : nat) : R :=
  match i, j with
  | 0%nat, 0%nat | 1%nat, 1%nat | 2%nat, 2%nat => 1
  | 0%nat, 1%nat | 1%nat, 0%nat | 1%nat, 2%nat | 2%nat, 1%nat => coupling
  | 0%nat, 2%nat | 2%nat, 0%nat => - coupling
  | _, _ => 0
  end.
Definition start (j : nat) : R := match j with 0%nat => 1 | _ => 0 end.

Lemma witness_symmetric i j : witness i j = witness j i.
Proof. destruct i as [|[|[|i]]], j as [|[|[|j]]]; reflexivity. Qed.

Lemma witness_positive x : 0 < nrm 3 x -> 0 < quad 3 witness x.
Proof.
  intros H. pose proof (pow_lt _ 2 H) as P. rewrite nrm_sq in P. unfold dot in P. simpl in P.
  unfold quad, dot, mv. simpl. unfold coupling.
  pose proof (pow2_ge_0 (x 0%nat + x 1%nat)). pose proof (pow2_ge_0 (x 0%nat - x 2%nat)).
  pose proof (pow2_ge_0 (x 1%nat + x 2%nat)). lra.
Qed.

Lemma entry_le x j : (j < 3)%nat -> Rabs (x j) <= nrm 3 x.
Proof.
  intros Hj. rewrite <- (sqrt_pow2 (Rabs (x j))) by apply Rabs_pos. apply sqrt_le_1_alt. rewrite pow2_abs.
  unfold dot. destruct j as [|[|[|j]]]; [| | |lia]; simpl; nra.
Qed.

Section Run.
Variables (b : nat -> nat) (x m : nat -> vec).
Hypothesis cyclic : forall k i, (i < 3)%nat -> b (k * 3 + i)%nat = i.
Hypothesis run : idle_momentum (fun j => j) b (mv 3 witness) (27 / 14) (3 / 10) x m.
Hypothesis x0 : x 0%nat = start.
Hypothesis m0 : m 0%nat = (fun _ => 0).

(* the left eigenvector *)
Let phi t := 2765 * x t 0%nat + 4879 * x t 1%nat + 2401 * x t 2%nat
             + 2165 * m t 0%nat - 905 * m t 1%nat - 2947 * m t 2%nat.

Lemma one_step k i : (i < 3)%nat -> forall j,
  m (S (k * 3 + i)%nat) j = 3 / 10 * m (k * 3 + i)%nat j
    + (1 - 3 / 10) * (if Nat.eqb j i then mv 3 witness (x (k * 3 + i)%nat) j else 0) /\
  x (S (k * 3 + i)%nat) j = x (k * 3 + i)%nat j - 27 / 14 * m (S (k * 3 + i)%nat) j.
Proof.
  intros Hi j. destruct (run (k * 3 + i)%nat) as [Hm Hx]. rewrite (cyclic k i Hi) in Hm.
  split; [rewrite Hm; reflexivity|]. rewrite Hx. unfold axpy. ring.
Qed.

Lemma grows k : phi (S k * 3)%nat = - (9261 / 8000) * phi (k * 3)%nat.
Proof.
  pose proof (one_step k 0 ltac:(lia)) as A. pose proof (one_step k 1 ltac:(lia)) as B.
  pose proof (one_step k 2 ltac:(lia)) as C.
  rewrite Nat.add_0_r in A. rewrite Nat.add_1_r in B.
  replace (k * 3 + 2)%nat with (S (S (k * 3))) in C by lia. unfold phi.
  replace (S k * 3)%nat with (S (S (S (k * 3)))) by lia.
  destruct (A 0%nat) as [a0 a0']. destruct (A 1%nat) as [a1 a1']. destruct (A 2%nat) as [a2 a2'].
  destruct (B 0%nat) as [b0 b0']. destruct (B 1%nat) as [b1 b1']. destruct (B 2%nat) as [b2 b2'].
  destruct (C 0%nat) as [c0 c0']. destruct (C 1%nat) as [c1 c1']. destruct (C 2%nat) as [c2 c2'].
  unfold mv in *. simpl in *. unfold coupling in *. lra.
Qed.

Lemma phi_size k : 2765 * (1 + INR k * (1261 / 8000)) <= Rabs (phi (k * 3)%nat).
Proof.
  assert (P : Rabs (phi (k * 3)%nat) = (9261 / 8000) ^ k * 2765).
  { induction k as [|k IH].
    - unfold phi. simpl. rewrite x0, m0. unfold start. rewrite Rabs_right; lra.
    - rewrite grows, Rabs_mult, IH, Rabs_left by lra. simpl. ring. }
  rewrite P. replace (9261 / 8000) with (1 + 1261 / 8000) by lra.
  pose proof (poly k (1261 / 8000) ltac:(lra)). lra.
Qed.

Lemma between a c : Rabs a <= c -> - c <= a <= c.
Proof. intros H. pose proof (Rle_abs a). pose proof (Rle_abs (- a)). rewrite Rabs_Ropp in *. lra. Qed.

Lemma above A : exists k, A < INR k.
Proof.
  destruct (archimed A) as [H _]. exists (Z.to_nat (up A)).
  destruct (Z_le_gt_dec 0 (up A)) as [P|P].
  - rewrite INR_IZR_INZ, Z2Nat.id by exact P. lra.
  - assert (IZR (up A) <= 0) by (apply IZR_le; lia). pose proof (pos_INR (Z.to_nat (up A))). lra.
Qed.

Theorem idle_momentum_unbounded : forall B, exists t, B < nrm 3 (x t).
Proof.
  intros B. destruct (above (Rabs B * 22079)) as [k Hk].
  set (t := (k * 3 + 2)%nat).
  destruct (Rlt_le_dec B (nrm 3 (x t))) as [H1|H1]; [exists t; exact H1|].
  destruct (Rlt_le_dec B (nrm 3 (x (S t)))) as [H2|H2]; [exists (S t); exact H2|].
  exfalso. pose proof (phi_size (S k)) as P. replace (S k * 3)%nat with (S t) in P by (unfold t; lia).
  pose proof (Rle_abs B) as B1. rewrite S_INR in P. pose proof (Rabs_pos B).
  assert (X : forall j, (j < 3)%nat -> Rabs (x (S t) j) <= Rabs B /\ Rabs (m (S t) j) <= 2 * Rabs B).
  { intros j Hj. pose proof (entry_le (x t) j Hj) as E1. pose proof (entry_le (x (S t)) j Hj) as E2.
    split; [lra|]. destruct (run t) as [_ Hx].
    assert (E : x (S t) j = x t j - 27 / 14 * m (S t) j) by (rewrite Hx; unfold axpy; ring).
    assert (- nrm 3 (x t) <= x t j <= nrm 3 (x t)) by (apply between; exact E1).
    assert (- nrm 3 (x (S t)) <= x (S t) j <= nrm 3 (x (S t))) by (apply between; exact E2).
    apply Rabs_le. lra. }
  destruct (X 0%nat ltac:(lia)) as [X0 M0]. destruct (X 1%nat ltac:(lia)) as [X1 M1].
  destruct (X 2%nat ltac:(lia)) as [X2 M2].
  apply between in X0, X1, X2, M0, M1, M2.
  assert (U : Rabs (phi (S t)) <= 22079 * Rabs B) by (apply Rabs_le; unfold phi; lra).
  nra.
Qed.
End Run.
