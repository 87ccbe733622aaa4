(* T4 on two coordinates: A = ((1, a), (a, 1)), |a| < 1, one coordinate at a time. The cycle map has trace
   2 (1 - eta) + eta^2 a^2 and determinant (1 - eta)^2; block descent's limit is exactly 2 = 2/L_max, while full
   gradient descent stops at 2/(1 + |a|). *)
From Coq Require Import Reals Lra Psatz.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import MomentumStability.
Open Scope R_scope.

(* one cycle, x' from (x, y) and then y' from (x', y): a linear map with the stated trace and determinant *)
Lemma cycle_matrix : forall a eta x y : R,
  let x' := x - eta * (x + a * y) in let y' := y - eta * (a * x' + y) in
  x' = (1 - eta) * x + (- eta * a) * y /\
  y' = (- eta * a * (1 - eta)) * x + (1 - eta + eta ^ 2 * a ^ 2) * y /\
  (1 - eta) + (1 - eta + eta ^ 2 * a ^ 2) = 2 * (1 - eta) + eta ^ 2 * a ^ 2 /\
  (1 - eta) * (1 - eta + eta ^ 2 * a ^ 2) - (- eta * a) * (- eta * a * (1 - eta)) = (1 - eta) ^ 2.
Proof. intros a eta x y x' y'. unfold y', x'. repeat split; ring. Qed.

Theorem two_blocks : forall a eta, a ^ 2 < 1 ->
  ((forall z, is_root (2 * (1 - eta) + eta ^ 2 * a ^ 2) ((1 - eta) ^ 2) z -> Cmod z < 1) <-> 0 < eta < 2).
Proof.
  intros a eta Ha. rewrite jury_roots. unfold jury. pose proof (pow2_ge_0 a).
  split.
  - intros [H1 [H2 H3]]. split; nra.
  - intros [H1 H2]. assert (0 < eta ^ 2) by (apply pow_lt; exact H1).
    assert (0 <= eta ^ 2 * a ^ 2) by (apply Rmult_le_pos; lra). repeat split; nra.
Qed.

(* full gradient descent: eigenvalues 1 +- a of A *)
Theorem two_blocks_full : forall a eta, 0 <= a < 1 ->
  (Rabs (1 - eta * (1 + a)) < 1 /\ Rabs (1 - eta * (1 - a)) < 1 <-> 0 < eta < 2 / (1 + a)).
Proof.
  intros a eta Ha. assert (E : 2 / (1 + a) * (1 + a) = 2) by (field; lra). set (B := 2 / (1 + a)) in *.
  split.
  - intros [H _]. apply Rabs_def2 in H. split; nra.
  - intros [H1 H2]. split; apply Rabs_def1; nra.
Qed.
